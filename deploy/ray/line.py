"""The stages of a pipeline in their order, from the manifests: what goes in at one end and comes out at the other."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from service.errors import BundleError
from service.manifest import Manifest, Precision, Variant, read_manifest
from service.settings import Settings
from service.versions import bundle_folders


@dataclass(frozen=True)
class Line:
    """A model as the client sees it, and the bundles that its tokens pass through, first to last."""

    name: str
    version: int
    stages: tuple[Manifest, ...]
    provider: str

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Those that every stage has for the provider."""
        offered = [{v.precision for v in stage.variants if v.provider == self.provider} for stage in self.stages]
        return tuple(v.precision for v in self._variants(self.stages[0]) if all(v.precision in has for has in offered))

    def models(self, precision: Precision) -> tuple[str, ...]:
        """The name that each stage serves `precision` under."""
        return tuple(f"{stage.name}-{precision}" for stage in self.stages)

    def _variants(self, stage: Manifest) -> list[Variant]:
        return [variant for variant in stage.variants if variant.provider == self.provider]


def find_line(settings: Settings, name: str, version: int) -> Line:
    """The stages that `name` was cut into, or `name` itself if it was not.

    Raises:
        BundleError: a stage is missing, or they do not fit one another; the message says which.
    """
    stages = _stages(settings.models, name, version)
    if not stages:
        stages = [read_manifest(settings.models / name / str(version))]
    line = Line(name, version, tuple(stages), settings.provider)
    if any(stage.d_memory is not None for stage in stages):
        raise BundleError(f"{name}: takes a memory, which a pipeline does not pass on")
    if any(a.d_out != b.d_in or a.kind != b.kind for a, b in pairwise(stages)):
        raise BundleError(f"{name}: the output of a stage is not what the next one takes")
    if stages[0].default_precision not in line.precisions:
        raise BundleError(f"{name}: not every stage has {stages[0].default_precision} for provider {settings.provider}")
    return line


def _stages(models: Path, name: str, version: int) -> list[Manifest]:
    folders = [folder / str(version) for folder in bundle_folders(models) if folder.name.startswith(f"{name}-stage")]
    found = [read_manifest(folder) for folder in folders if folder.is_dir()]
    parts = {m.stage.index: m for m in found if m.stage is not None and m.stage.of == name}
    if not parts:
        return []
    first = next(iter(parts.values())).stage
    assert first is not None
    for index in range(1, first.count + 1):
        part = parts.get(index)
        if part is None:
            raise BundleError(f"{models / name}: stage {index} of {first.count} is missing")
        if part.stage is None or part.stage.whole != first.whole or part.stage.count != first.count:
            raise BundleError(f"{models / part.name}: it was cut from another export than the other stages")
    return [parts[index] for index in range(1, first.count + 1)]
