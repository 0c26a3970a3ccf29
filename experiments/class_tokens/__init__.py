"""Do several class tokens become one?"""
