"""The start-up check: does this machine give a request the same bits in every row and through every program?"""
