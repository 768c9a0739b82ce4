"""Diagnostics: overflow reports, precision records, and checks for scale leaks."""
