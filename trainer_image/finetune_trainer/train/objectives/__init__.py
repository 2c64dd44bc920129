"""Objectives, one module each; they implement `network.Objective`."""
