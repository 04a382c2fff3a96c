"""Where this package leans on Lightning's inner workings."""
