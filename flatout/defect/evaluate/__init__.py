"""How good is a network: heat maps of whole images, and numbers about them.

Files:

    evaluate  Judge a network on whole images: heat maps against masks, one image at a time
    scores    What an evaluation found
    sweep     How sure is a network of made-up defects, by strength and by the planes they are in?
"""
