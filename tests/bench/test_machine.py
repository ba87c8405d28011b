from __future__ import annotations

import time
from pathlib import Path

from bench.machine import CpuTimes, Usage, UsageMeter, cpu_model, describe_machine


def test_usage_gives_each_second_of_cpu_to_whoever_spent_it() -> None:
    before = CpuTimes(at=100.0, busy=50.0, stolen=1.0, load=5.0, server=7.0)
    after = CpuTimes(at=102.0, busy=54.0, stolen=1.5, load=5.5, server=10.0)
    assert before.until(after) == Usage(server=1.5, load=0.25, foreign=0.25, stolen=0.25)


def test_ticks_that_do_not_agree_are_not_negative_work_of_others() -> None:
    before = CpuTimes(at=0.0, busy=0.0, stolen=0.0, load=0.0, server=0.0)
    assert before.until(CpuTimes(at=1.0, busy=1.0, stolen=0.0, load=0.51, server=0.5)).foreign == 0.0


def test_the_meter_sees_the_work_of_this_process_as_load() -> None:
    meter = UsageMeter(lambda: 0.0)
    until = time.process_time() + 0.1
    while time.process_time() < until:
        pass
    usage = meter.read()
    assert 0 < usage.load <= 1.5
    assert usage.server == 0


def test_the_processor_has_a_name_from_linux_or_from_python(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some CPU @ 2GHz\nmodel name\t: Some CPU @ 2GHz\n")
    assert cpu_model(tmp_path / "cpuinfo") == "Some CPU @ 2GHz"
    assert cpu_model(tmp_path / "absent")


def test_the_machine_is_described_with_versions_and_threads() -> None:
    facts = describe_machine(3)
    assert facts["threads"] == 3
    assert {"cpu", "cores", "onnxruntime", "python", "tokenslab"} <= facts.keys()
