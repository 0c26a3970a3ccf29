"""How much accuracy does merging cost for the time that it saves?"""
