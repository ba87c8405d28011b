"""One file for each family: copies weights into a reference block and proves equality with the original module."""
