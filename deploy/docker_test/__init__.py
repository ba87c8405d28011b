"""`make docker-test`: the image, built and run for real through compose, and stopped under load.

It drives Docker's command line and talks HTTP; the right answers come from ONNX Runtime on the same bundle files.
"""
