"""How good can a distilled ViT be?"""
