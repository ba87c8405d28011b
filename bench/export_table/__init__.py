"""`make export-table`: every architecture in every precision, exported, proved and timed; the page of what came out.

Owns the rows and their bars. It needs the extras `export` and `demo`: torch makes the weights, transformers the models.
"""
