"""Declared data sets, one idea a file; every file here is found by itself (see ``base``)."""
