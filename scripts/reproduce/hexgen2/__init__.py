"""HexGen-2"""
