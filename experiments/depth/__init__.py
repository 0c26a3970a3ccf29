"""Do LayerScale and class attention let a deep model train?"""
