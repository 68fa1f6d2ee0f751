"""DistServe"""
