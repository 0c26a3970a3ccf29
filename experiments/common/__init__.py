"""Code that all studies share: study definition, runner, datasets, statistics, tables and plots."""
