"""Records with provenance, the papers' numbers, tables, figures, verdicts and the report.

Everything here reads records and files; nothing here runs a model or imports
``repro.experiments``.  Importing the package costs nothing: each module is
imported by name where it is needed.
"""
