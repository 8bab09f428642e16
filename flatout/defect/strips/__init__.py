"""From files to canonical images: three aligned pictures of one pattern, target, ref1 and ref2."""
