"""Bundle -> HTTP. Never imports torch and knows nothing of export/."""

import os

# The official wheels of ONNX Runtime report their use (its Privacy.md), unless told not to before they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
