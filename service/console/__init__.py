"""The console: a page at `/` that shows models, windows and the last minutes, and what feeds it. It changes nothing in
the service, and infers only as any client does: through the public route, from the browser.
"""
