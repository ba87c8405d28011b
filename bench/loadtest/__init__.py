"""Load tests of any server of the Open Inference Protocol v2: arrivals, sizes, clients, statistics and reports.

It knows the protocol and HTTP, and nothing of the service behind them.
"""
