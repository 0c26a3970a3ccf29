// The tokens of a model before merging: special ones, then a patch grid of steps in time, rows and columns.

export const tokensOf = ({ special, grid: [steps, rows, columns] }) => special.length + steps * rows * columns;
