"""Data loaders: in memory on the device, or streamed by workers."""
