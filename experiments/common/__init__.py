"""What all experiments share: studies and how they are run, data, statistics, tables, plots."""
