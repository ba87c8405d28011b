"""One module per peer, run by the peer's own interpreter; they import `common` and nothing else of the project."""
