"""Does a distillation token help, and when?"""
