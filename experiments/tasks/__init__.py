"""Do task tokens specialize?"""
