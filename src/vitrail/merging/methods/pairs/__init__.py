"""Methods that merge pairs of similar tokens, with other scores than ToMe's."""
