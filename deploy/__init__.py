"""What builds, runs and tries the service elsewhere; no part of the installed package."""
