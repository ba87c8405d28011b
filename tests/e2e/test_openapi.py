"""schemathesis reads the OpenAPI document and asks what it allows, and what it does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.e2e.server import serving

MODELS = Path(__file__).parents[2] / "models"
KEY = "ops-ops-ops-ops-ops"
CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method"
)

# Without a model's name nearly all requests are 404s; 501, 503 and 504 are documented and no faults of the server.
CONFIG = """
[parameters]
"path.name" = "demo-block"
"path.version" = "1"
[checks]
not_a_server_error.expected-statuses = ["2xx", "4xx", 501, 503, 504]
"""
# Whoever unloads the model, or sets a timeout of nothing, is answered as documented; the rest would not be tried then.
APART = ("/v2/repository/models/{name}/unload", "/v2/settings")


def test_every_answer_is_one_that_the_document_has_and_none_is_a_500(tmp_path: Path) -> None:
    config = tmp_path / "schemathesis.toml"
    config.write_text(CONFIG)
    with serving(MODELS, "--threads", "1", "--body-timeout", "5", TOKENSLAB_ADMIN_KEYS=f"ops:{KEY}") as server:
        process = psutil.Process(server.process.pid)
        before = process.memory_info().rss
        command = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(config), "run"]
        command += [f"http://127.0.0.1:{server.port}/openapi.json", "--checks", CHECKS, "--no-color"]
        command += ["--header", f"X-API-Key: {KEY}", "--phases", "coverage,fuzzing", "--max-examples", "5"]
        command += ["--max-response-time", "20", "--continue-on-failure"]
        for path in APART:
            command += ["--exclude-path", path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert "passed" in done.stdout
        assert server.metric("tokenslab_rejections_total", reason="internal") == 0
        assert process.memory_info().rss - before < 200 << 20
    assert not [line for line in server.log if "Traceback" in line], server.log
