# The service in a container: a venv with the runtime dependencies of deploy/lock, each file of which has its hash there.
# Models are mounted at /models; nothing is written, so the root may be read-only.

ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS build
# The extra that brings ONNX Runtime: cpu or cuda.
ARG EXTRA=cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
# No pip in the venv: the base image's installs into it from outside, and only the venv goes on.
RUN python3 -m venv --without-pip /opt/venv
# Dependencies before sources: a change of code then builds in seconds.
COPY deploy/lock deploy/lock
RUN python3 -m pip --python /opt/venv/bin/python install --only-binary :all: --require-hashes \
      --requirement deploy/lock/${EXTRA}.txt
COPY pyproject.toml README.md LICENSE tokenslab.py ./
COPY service service
COPY export export
COPY bench bench
# What an image can spare: the test suites of the dependencies, headers, and the model converters within ONNX Runtime.
# Byte code stays: with a read-only root it could not be written later, and each start would compile everything anew.
RUN python3 -m pip --python /opt/venv/bin/python install --no-deps . \
 && cd /opt/venv/lib/python3*/site-packages \
 && find . -type d \( -name tests -o -name test \) -prune -exec rm -rf {} + \
 && rm -rf numpy/_core/include onnxruntime/transformers onnxruntime/quantization onnxruntime/tools \
 && /opt/venv/bin/tokenslab serve --help > /dev/null \
 && /opt/venv/bin/python -c "import service.app, service.server"

FROM ${BASE_IMAGE}
ARG REVISION=unknown
LABEL org.opencontainers.image.title="tokenslab" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.description="Feed-forward networks and Transformer blocks over HTTP: the tokens of all requests in one matmul" \
      org.opencontainers.image.licenses="Apache-2.0"
# A fixed number, so that volumes and `runAsNonRoot` can rely on it.
RUN groupadd --gid 10001 tokenslab \
 && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin tokenslab
COPY --from=build /opt/venv /opt/venv
# ONNX Runtime's official wheels report their use to Microsoft unless told not to (its Privacy.md).
ENV PATH=/opt/venv/bin:$PATH \
    ORT_DISABLE_TELEMETRY=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOKENSLAB_HOST=0.0.0.0 \
    TOKENSLAB_PORT=8000 \
    TOKENSLAB_MODELS=/models
USER 10001:10001
WORKDIR /
EXPOSE 8000
STOPSIGNAL SIGTERM
# Without site (-S) and with the standard library alone: one check costs what a bare Python costs.
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
  CMD ["/opt/venv/bin/python", "-I", "-S", "-c", "import http.client, os; \
c = http.client.HTTPConnection('127.0.0.1', int(os.environ['TOKENSLAB_PORT']), timeout=2); \
c.request('GET', '/v2/health/ready'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["tokenslab"]
CMD ["serve"]
