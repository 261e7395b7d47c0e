"""Statistics, tables, figures and claims over recorded trials; this package never runs a trial."""
