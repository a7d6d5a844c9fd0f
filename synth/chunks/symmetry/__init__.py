"""Groups that act freely on the chunks of an instance, and the instance cut down to its orbits."""
