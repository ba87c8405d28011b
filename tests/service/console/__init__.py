"""The console without a browser: what feeds the page, and the files it is made of."""
