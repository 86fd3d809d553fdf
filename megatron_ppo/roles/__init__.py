"""WHAT is computed: networks and stateless forward passes."""
