"""Does merging work for audio and video as it does for images?"""
