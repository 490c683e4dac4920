"""`report.html`: a page about a run that is one file, and opens offline in any browser."""
