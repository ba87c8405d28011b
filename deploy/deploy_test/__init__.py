"""`make deploy-test`: what is deployed besides one container. Each part is run, or named as not run with the reason."""
