"""Does merging do for sounds and videos what it does for pictures?"""
