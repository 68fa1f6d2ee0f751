"""Loops are found in what the disassembler prints, and their instructions counted."""

from scripts.kernels.machine_code import tile_loop

# A loop over tiles whose wait goes on behind the program's end, after a loop without products.
CODE = """
.L_x_0:
        /*0000*/                   LDG.E R4, [R2] ;
        /*0010*/               @P0 BRA `(.L_x_0) ;
.L_x_1:
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R0 ;
        /*0030*/              @!P1 BRA `(.L_x_3) ;
.L_x_2:
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0060*/                   MUFU.EX2 R6, R7 ;
        /*0070*/              @!P3 STL [R1+0x8], R6 ;
        /*0080*/                   UBAR.SYNC ;
        /*0090*/              @!UP0 BRA `(.L_x_1) ;
        /*00a0*/                   EXIT ;
.L_x_3:
        /*00b0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR4], R0 ;
        /*00c0*/                   BRA `(.L_x_2) ;
"""


def test_the_loop_with_products() -> None:
    found = tile_loop(CODE)
    assert found == {
        "instructions": 8,
        "products": 1,
        "MUFU": 1,
        "waits": 2,
        "barriers": 0,
        "STS": 0,
        "LDS": 0,
        "LDG": 0,
        "local": 1,
    }


def test_products_of_integers() -> None:
    found = tile_loop(CODE.replace("HGMMA.64x128x16.F32.BF16", "IGMMA.64x64x32.S8.S8"))
    assert found is not None
    assert found["products"] == 1


def test_no_loop() -> None:
    assert tile_loop(CODE.replace("HGMMA", "FFMA")) is None
