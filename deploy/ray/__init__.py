"""The service on Ray Serve (the extra `ray`): the same engine and bundles, as replicas that a cluster scales.

`service` is the whole service in every replica, `pipeline` a stack cut into stages that lie on different nodes. Windows
form inside each replica; Ray decides how many there are, where they run and who gets a request. Nothing here decides
what is computed: that is `service/`'s.
"""
