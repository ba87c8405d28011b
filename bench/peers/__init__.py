"""The service against its peers: other servers with the same graph, cases and load, in turn within one run."""
