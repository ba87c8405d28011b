"""`python -m bench.chaos`: clients of every kind, good, bad and slow, against a real server whose models change.

What is claimed: every accepted request is answered right, bit for bit; everyone else gets the documented status; the
server answers 500 to nobody and exits 0 on SIGTERM in the middle of it all.
"""
