"""The dependencies of this package on Lightning's internals."""
