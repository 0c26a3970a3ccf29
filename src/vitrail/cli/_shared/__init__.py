"""What several commands share: console, options, output files, ranks, model loading, predictions, summaries."""
