"""``vitrail web``: a page on which a model's tokens merge under a slider, served or written as plain files."""
