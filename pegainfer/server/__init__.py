"""The OpenAI-compatible HTTP server.

`protocol` (bytes to requests), `streaming` and `responses` (outputs to bytes) do no I/O; `serving` joins them
with the engine; `app` has the routes; `run` is the process.
"""
