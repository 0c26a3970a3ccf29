"""Does a token for each task specialise?"""
