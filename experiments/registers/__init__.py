"""Do artifact tokens appear, and what do registers do?"""
