"""The tests of lightning_4d; the folders mirror those of the sources."""
