"""How good is a network: heat maps of whole images, and numbers about them."""
