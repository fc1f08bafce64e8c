"""Records of the tests that take too long for `make test`, and of the gate itself; the tests are marked `long`."""
