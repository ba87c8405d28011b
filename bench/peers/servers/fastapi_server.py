"""FastAPI on uvicorn, as it is mostly written: one run a request, in a thread, no batching."""

from __future__ import annotations

import anyio.to_thread
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

from bench.peers.servers.common import PORT, Model, decode

app = FastAPI()
model = Model()


@app.post("/infer")
async def infer(request: Request) -> Response:
    """Raw rows in, raw rows out."""
    try:
        tokens = decode(await request.body())
    except ValueError as error:
        raise HTTPException(400, str(error)) from error
    (out,) = await anyio.to_thread.run_sync(model.run, [tokens])
    return Response(out.tobytes(), media_type="application/octet-stream")


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning", access_log=False)
