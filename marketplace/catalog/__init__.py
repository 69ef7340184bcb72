"""What may be rented: types of machines, their variants, and the datacenters that they are in."""
